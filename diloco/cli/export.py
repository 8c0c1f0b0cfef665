"""`diloco export`: converts a checkpoint to a model that transformers can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from cyclopts import App

from diloco.errors import UserError
from diloco.options.flags import AsJson

app = App(name="export")


@app.default
def export(
    checkpoint: str,
    directory: Path,
    *,
    weights: Literal["agreed", "own"] = "agreed",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights, configuration and tokenizer in the format of transformers.

    Parameters
    ----------
    checkpoint: str
        A model_step_<N> directory or URL, or the value of --ckpt.path: then the newest complete checkpoint there.
    directory: Path
        Directory to write; it must not exist.
    weights: str
        For a checkpoint of a swarm: `agreed` are the weights after the last outer step, which are the same on all
        peers; `own` are the weights of the one peer, with its inner steps since then.
    """
    if directory.exists():
        raise UserError(f"{directory} already exists; give a new directory")
    if "://" not in checkpoint and not Path(checkpoint).exists():
        raise UserError(
            f"{checkpoint} does not exist; give the directory of --ckpt.path, or one model_step_<N> in it"
        )
    from diloco.checkpoint.export import exported

    result = exported(checkpoint, directory, weights=weights)
    words = f"{directory}: the {result['weights']} weights of {result['checkpoint']}"
    print(json.dumps(result) if as_json else words, flush=True)
