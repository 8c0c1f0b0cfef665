"""`diloco export`: a model that transformers loads, from what a training has saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from diloco.errors import UserError

app = App(name="export")


@app.default
def export(
    checkpoint: str,
    directory: Path,
    *,
    weights: Literal["agreed", "own"] = "agreed",
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> None:
    """Write a checkpoint's model, configuration and tokenizer as transformers loads them.

    Parameters
    ----------
    checkpoint: str
        A model_step_<N> directory or URL, or the path given as --ckpt.path, for the newest complete checkpoint there.
    directory: Path
        The model's directory; it must not exist yet.
    weights: str
        Of a swarm's checkpoint: `agreed` are those of the last outer step, the same on all peers; `own` those that the
        peer had trained on from there.
    as_json: bool
        Print a JSON object instead of words.
    """
    if directory.exists():
        raise UserError(f"{directory} exists already; name another")
    if "://" not in checkpoint and not Path(checkpoint).exists():
        raise UserError(
            f"{checkpoint} does not exist; give the directory of --ckpt.path, or one model_step_<N> in it"
        )
    from diloco.checkpoint.export import exported

    told = exported(checkpoint, directory, weights=weights)
    words = f"{directory}: the {told['weights']} weights of {told['checkpoint']}"
    print(json.dumps(told) if as_json else words, flush=True)
