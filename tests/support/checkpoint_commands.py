"""The README's commands about checkpoints, which tests/e2e/test_export.py runs."""

SAVE = (
    "diloco peer --initial-peers <maddr> --ckpt.path checkpoints --ckpt.interval 100 --ckpt.topk 3 "
    "--ckpt.resume auto"
)
EXPORT = "diloco export checkpoints model"
ALL = {SAVE, EXPORT}
