"""`diloco ckpt rebuild`: rebuilds the full model of a step from delta checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from cyclopts import App

from diloco.errors import UserError
from diloco.options.flags import AsJson, Whole

rebuild_app = App(name="rebuild")


@rebuild_app.default
def rebuild(directory: Path, out: Path, *, step: Whole | None = None, as_json: AsJson = False) -> None:
    """Rebuild a full model from delta checkpoints (--ckpt.delta-interval).

    Parameters
    ----------
    directory: Path
        Directory of the delta checkpoints: <run directory>/deltas, or --ckpt.delta-path.
    out: Path
        Directory to write, which transformers can load; it must not exist.
    step: int
        Training step to rebuild; default: the last one that was saved.
    """
    if not directory.is_dir():
        raise UserError(
            f"{directory} is not a directory; give that of the delta checkpoints (--ckpt.delta-path)"
        )
    if out.exists():
        raise UserError(f"{out} already exists; give a new directory for the model")
    from diloco.data.tokenizer import load_tokenizer
    from diloco.options.model_files import load_model_config, save_pretrained_dir
    from diloco.rl.deltas import rebuilt, steps_in

    steps = steps_in(directory)
    if not steps:
        raise UserError(f"{directory} contains no step_<N>.safetensors")
    number = steps[-1] if step is None else step
    state = rebuilt(directory, number)
    save_pretrained_dir(out, state, load_model_config(str(directory)), load_tokenizer(str(directory)))
    result = {"step": number, "out": str(out), "tensors": len(state)}
    print(json.dumps(result) if as_json else f"{out}: the model of step {number}", flush=True)
