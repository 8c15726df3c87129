"""The image of a release: its Dockerfile is built, without root where one can, and an agent remembers in it."""

import os
import pwd
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.install.place import Failed, NotRun, Place

BASE = "debian:trixie-slim"
_OWN_BASE = "localhost/kvasir-base:trixie"
_BUILT_WITHIN_S = 2400
# Where the program runs without a shell of a user: what is asked for after the build.
_TALK = """kvasir up -d; kvasir chat ada --once 'My dog is called Rex.'; kvasir chat ada --once 'What is my dog called?'
kvasir down"""


def image(place: Place) -> None:
    if shutil.which("buildah") is None:
        raise NotRun(
            "no buildah here (Debian: apt install buildah uidmap, and debootstrap where no registry is reached)"
        )
    builder = Builder(place.home.parent / "image")
    base = builder.base()
    context = builder.folder / "context"
    shutil.copytree(place.home / "kvasir" / "out" / "release", context)
    builder.run(f"buildah bud --build-arg BASE={base} -t localhost/kvasir:test {context}")
    container = builder.run("buildah from localhost/kvasir:test").strip()
    printed = builder.run(f"buildah run --user kvasir {container} -- sh -c {shlex.quote(_TALK)}")
    builder.run(f"buildah rm {container} && buildah rmi localhost/kvasir:test")
    if "Rex" not in printed:
        raise Failed(f"ada does not remember in the container: {printed[-500:]!r}")


class Builder:
    """buildah with storage of its own; for root it runs as the first user who has a range of others' ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._user = unprivileged_user() if os.geteuid() == 0 else ""
        if self._user:
            shutil.chown(folder, self._user)
        elif os.geteuid() == 0:
            print("  image: built by root: /etc/subuid names no user (useradd builder)", flush=True)

    def base(self) -> str:
        """The base of the Dockerfile, or one that debootstrap makes of Debian's packages."""
        try:
            self.run(f"buildah pull --quiet {BASE}")
        except Failed:
            return self._debootstrapped()
        return BASE

    def run(self, line: str) -> str:
        settings = (
            f"export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot HOME={self.folder} XDG_RUNTIME_DIR={self.folder};"
        )
        command = ["bash", "-euo", "pipefail", "-c", f"{settings} {line}"]
        if self._user:
            command = ["runuser", "-u", self._user, "--", *command]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=_BUILT_WITHIN_S, check=False
        )
        if done.returncode:
            raise Failed(f"{line}\n  ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:].strip()}")
        return done.stdout

    def _debootstrapped(self) -> str:
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            raise NotRun(f"{BASE} cannot be pulled, and debootstrap, which makes one, needs root")
        root = self.folder / "base"
        command = ["debootstrap", "--variant=minbase", "trixie", str(root)]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILT_WITHIN_S)
        trusted = Path("/etc/ssl/certs/ca-certificates.crt")
        if trusted.exists():  # whom this machine trusts: registries may be reached through a host of its own
            own = root / "usr/local/share/ca-certificates"
            own.mkdir(parents=True, exist_ok=True)
            shutil.copy(trusted, own / "host.crt")
        archive = self.folder / "base.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
        self.run(f"c=$(buildah from scratch); buildah add $c {archive} /; buildah commit $c {_OWN_BASE}; buildah rm $c")
        return _OWN_BASE


def unprivileged_user() -> str:
    """The first name of /etc/subuid that is a user's; empty if there is none."""
    ranges = Path("/etc/subuid")
    names = [line.split(":")[0] for line in ranges.read_text().splitlines()] if ranges.exists() else []
    users = {each.pw_name for each in pwd.getpwall() if each.pw_uid}
    return next((name for name in names if name in users), "")
