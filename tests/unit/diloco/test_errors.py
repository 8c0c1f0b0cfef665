from __future__ import annotations

from diloco.errors import print_box


def test_a_line_for_a_toml_file_stands_below_the_box_whole(capsys):
    line = f'host_key = "ssh-ed25519 {"A" * 120}"'
    print_box("diloco", f"The host key is not known; put this line into its entry:\n{line}")
    said = capsys.readouterr().err
    assert line in said.splitlines()
    assert "The host key is not known" in said.partition("╰")[0]
