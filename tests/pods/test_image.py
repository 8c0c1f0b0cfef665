"""Each instruction of the Dockerfile, carried out in a private copy of this machine's root.

The copy (overlayfs in a mount namespace) stands for the base image: a Debian with Python. It needs root, a package
index and minutes. The test does not show that the base image exists and has the expected contents.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.image import as_shell, values

_NAMESPACE = """
set -e
mount -t tmpfs tmpfs "$PLACE"
mkdir "$PLACE/upper" "$PLACE/work" "$PLACE/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$PLACE/upper,workdir=$PLACE/work" "$PLACE/root"
mount --rbind /dev "$PLACE/root/dev"
mount -t proc proc "$PLACE/root/proc"
exec chroot "$PLACE/root" sh "$SCRIPT"
"""


@pytest.mark.pods
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_the_image_is_built_and_starts_a_peers_help_as_its_user(tmp_path):
    entry, arguments = (re.findall(r'"([^"]+)"', values(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    user, uid = values("USER")[0], 10001
    python = Path(sys.base_prefix) / "bin"
    # In the image every user can read Python; here its directories may be closed to others.
    readable = "\n".join(f"chmod o+x {parent}" for parent in (python, *python.parents))
    script = tmp_path / "build.sh"
    as_user = shlex.join(
        ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env", "HOME=/data"]
    )
    checks = [
        f'test "$(id -u {user})" = {uid}',
        f"{as_user} {shlex.join([*entry, *arguments])}",
        f"{as_user} {shlex.join([*entry, 'doctor', '--help'])} >/dev/null",
        f"cd / && {as_user} python -c 'import diloco; print(diloco.__file__, diloco.Diloco)'",
        f"{as_user} touch {values('VOLUME')[0]}/kept",
    ]
    script.write_text("\n".join([readable, as_shell(), *checks]), encoding="utf-8")
    (place := tmp_path / "place").mkdir()
    environment = {
        "PATH": f"{python}:/usr/sbin:/usr/bin:/sbin:/bin",
        "SOURCE": str(ROOT),
        "SCRIPT": str(script),
        "PLACE": str(place),
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
    }
    unshare = [str(shutil.which("unshare")), "--mount", "--propagation", "private"]
    unshare += ["--pid", "--fork", "--kill-child", "sh", "-c", _NAMESPACE]
    built = subprocess.run(unshare, env=environment, capture_output=True, text=True, timeout=1800)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-4000:]
    assert "Usage: diloco peer" in built.stdout
    assert "/opt/diloco/lib/" in built.stdout
    # The build has changed nothing on this machine.
    assert not Path("/opt/diloco").exists() and not list(place.iterdir())
