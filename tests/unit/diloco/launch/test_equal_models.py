from __future__ import annotations

from pathlib import Path

from diloco.launch.equal_models import link_equal_weights

SAME = b"weights" * 100


def saved(run_dir: Path, content: bytes) -> Path:
    model = run_dir / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(content)
    return model / "model.safetensors"


def test_weights_that_are_equal_take_their_space_once(tmp_path):
    run_dirs = [tmp_path / f"peer-{rank}" for rank in range(6)]
    others = {3: SAME[::-1], 4: SAME + b"."}
    # The last peer was still restarting when the training ended, and has no model.
    files = [saved(run_dirs[rank], others.get(rank, SAME)) for rank in range(5)]
    for _ in range(2):
        link_equal_weights(run_dirs)
        assert [file.stat().st_nlink for file in files] == [3, 3, 3, 1, 1]
    assert [file.read_bytes() for file in files] == [others.get(rank, SAME) for rank in range(5)]
    assert not files[1].with_name("config.json").samefile(files[0].with_name("config.json"))
    assert all({path.name for path in file.parent.iterdir()} == {"config.json", file.name} for file in files)


def test_a_file_system_without_links_keeps_the_copies(tmp_path, monkeypatch):
    def refused(*_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "hardlink_to", refused)
    run_dirs = [tmp_path / "peer-0", tmp_path / "peer-1"]
    files = [saved(directory, SAME) for directory in run_dirs]
    link_equal_weights(run_dirs)
    assert [(file.stat().st_nlink, file.read_bytes()) for file in files] == [(1, SAME)] * 2
