"""`diloco ckpt rebuild`: the whole model of a step, from the changes that a training has saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from diloco.errors import UserError
from diloco.options.checks import at_least, whole

rebuild_app = App(name="rebuild", usage="Usage: diloco ckpt rebuild DIRECTORY OUT [OPTIONS]")

Step = Annotated[int | None, Parameter(converter=whole, validator=at_least(0))]


@rebuild_app.default
def rebuild(
    directory: Path, out: Path, *, step: Step = None, as_json: Annotated[bool, Parameter("--json")] = False
) -> None:
    """Rebuild a full model from delta checkpoints (--ckpt.delta-interval).

    Parameters
    ----------
    directory: Path
        Where the deltas are: <run directory>/deltas, or --ckpt.delta-path.
    out: Path
        The model's directory, which transformers loads; it must not exist yet.
    step: int
        The step of the training; default: the last one that was saved.
    as_json: bool
        Print a JSON object instead of words.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; name the one that --ckpt.delta-path said")
    if out.exists():
        raise UserError(f"{out} exists already; name another directory for the model")
    from diloco.data.tokenizer import load_tokenizer
    from diloco.options.model_files import load_model_config, save_pretrained_dir
    from diloco.rl.deltas import rebuilt, steps_in

    steps = steps_in(directory)
    if not steps:
        raise UserError(f"{directory} holds no step_<N>.safetensors")
    number = steps[-1] if step is None else step
    state = rebuilt(directory, number)
    save_pretrained_dir(out, state, load_model_config(str(directory)), load_tokenizer(str(directory)))
    told = {"step": number, "out": str(out), "tensors": len(state)}
    print(json.dumps(told) if as_json else f"{out}: the model of step {number}", flush=True)
