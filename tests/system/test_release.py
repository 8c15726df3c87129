"""A release: its version is a tag's, in every package and in the changelog; what is built here is what the tree has."""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import kvasir
import pytest

from tests.install.place import check_sums
from tools.release import __main__ as release
from tools.release import packages
from tools.release import version as versions
from tools.release.version import ReleaseError

ROOT = Path(__file__).parents[2]


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of one commit: the files that have a version."""
    for name in (*versions.PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "all")
    return tmp_path


def test_all_packages_of_the_tree_have_one_version() -> None:
    assert set(versions.stated(ROOT).values()) == {kvasir.__version__}


def test_without_a_tag_the_release_names_the_one_to_give(tree: Path) -> None:
    with pytest.raises(ReleaseError, match=rf"git tag v{kvasir.__version__}.*TRY=1"):
        versions.of_tag(tree)
    git(tree, "tag", "v1.2")
    with pytest.raises(ReleaseError, match=r"its tag is v1\.2"):
        versions.of_tag(tree)


def test_a_tag_is_the_version_of_its_own_files_alone(tree: Path) -> None:
    git(tree, "tag", "v3.4.5")
    assert versions.of_tag(tree) == "3.4.5"
    (tree / "pyproject.toml").write_text((tree / "pyproject.toml").read_text() + "\n")
    spaced = tree / "two words.md"
    spaced.touch()
    git(tree, "add", spaced.name)
    with pytest.raises(ReleaseError, match=r"commit or restore pyproject\.toml, two words\.md$"):
        versions.of_tag(tree)


def test_the_version_is_written_into_every_package_and_the_changelog_gets_the_day(tree: Path) -> None:
    page = tree / "CHANGELOG.md"
    page.write_text(page.read_text().replace("## 0.1.0 — unreleased", "## 3.4.5 — unreleased"))
    versions.write(tree, "3.4.5")
    assert set(versions.stated(tree).values()) == {"3.4.5"}
    assert "## 3.4.5 — 2" in page.read_text()
    assert git(tree, "diff", "--shortstat").startswith(f"{len(versions.PLACES) + 1} files changed, 8 insertions")


@pytest.mark.parametrize("without", [f"## {kvasir.__version__}", versions.CHANGES])
def test_a_version_whose_changes_for_clients_are_not_written_is_not_released(tree: Path, without: str) -> None:
    page = tree / "CHANGELOG.md"
    page.write_text(page.read_text().replace(without, "## Else"))
    with pytest.raises(ReleaseError, match=rf"'## {kvasir.__version__}' with a part '{versions.CHANGES}'"):
        versions.write(tree, kvasir.__version__)


def test_every_version_of_the_changelog_lists_the_changes_of_clients() -> None:
    sections = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert sections
    assert [section.splitlines()[0] for section in sections if versions.CHANGES not in section] == []


def test_packages_that_need_no_toolchain_have_every_file_of_their_clients(tmp_path: Path) -> None:
    packages.go(ROOT, tmp_path, "3.4.5")
    packages.swift(ROOT, tmp_path, "3.4.5")
    proxy = tmp_path / "go/kvasir.org/client/@v"
    assert (proxy / "list").read_text() == "v3.4.5\n"
    for archive, below, client in (
        (proxy / "v3.4.5.zip", "kvasir.org/client@v3.4.5", "clients/go"),
        (tmp_path / "kvasir-swift-3.4.5.zip", "kvasir-swift-3.4.5", "clients/swift"),
    ):
        inside = set(zipfile.ZipFile(archive).namelist())
        tracked = git(ROOT, "ls-files", client).splitlines()
        assert {f"{below}{name.removeprefix(client)}" for name in tracked} <= inside


def broken(_tree: Path, out: Path, _version: str) -> None:
    (out / "half").touch()
    raise OSError("no space left")


def test_a_build_that_fails_leaves_the_earlier_release(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "ROOT", tree)
    monkeypatch.setattr(release, "PACKAGES", (packages.Package("broken", broken),))
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "SHA256SUMS").write_text("as it was")
    with pytest.raises(OSError, match="no space left"):
        release.release(earlier, "https://example.org", attempt=True)
    assert [file.read_text() for file in earlier.iterdir()] == ["as it was"]


def test_a_folder_that_holds_no_release_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("mine")
    command = [sys.executable, "-m", "tools.release", "--try", "--out", tmp_path]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, "name another folder" in ended.stderr) == (2, True), ended.stderr
    assert (tmp_path / "letter").read_text() == "mine"


def test_a_place_is_a_url_and_no_ruby() -> None:
    assert release.url("https://example.org/v1/") == "https://example.org/v1"
    assert release.url((ROOT / "out/release").as_uri())
    for text in ("example.org", 'https://x.y/"; system("id"); "', "https://x.y/#{`id`}", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a URL"):
            release.url(text)


def test_the_formula_and_the_sums_name_the_bytes_that_lie_there(tmp_path: Path) -> None:
    (tmp_path / "kvasir-3.4.5.tar.gz").write_bytes(b"source")
    release.formula(tmp_path, "3.4.5", "https://example.org/v3.4.5")
    text = (tmp_path / "kvasir.rb").read_text()
    assert 'url "https://example.org/v3.4.5/kvasir-3.4.5.tar.gz"' in text
    assert f'sha256 "{hashlib.sha256(b"source").hexdigest()}"' in text
    assert "@HOMEPAGE@" not in text
    assert "\n  preserve_rpath" in text, "Homebrew fails where it cannot rename the libraries of wheels"
    (tmp_path / "SHA256SUMS").write_text(release.sums(tmp_path))
    check_sums(tmp_path)


def test_the_image_of_a_release_is_built_where_its_files_lie(tmp_path: Path) -> None:
    packages.image(ROOT, tmp_path, "3.4.5")
    compose = (tmp_path / "compose.yaml").read_text()
    assert "build: .\n" in compose
    assert "image: kvasir:3.4.5\n" in compose
    copied = next(line for line in (tmp_path / "Dockerfile").read_text().splitlines() if line.startswith("COPY "))
    assert copied.split()[1:-1] == ["constraints.txt", "kvasir-*.whl"], "nothing else of a release is sent"


@pytest.mark.long(14)
def test_the_wheel_of_the_source_archive_is_the_one_of_the_tree(tmp_path: Path) -> None:
    """An archive that lacks a file still builds a wheel, which lacks it too."""
    tree, out, beside = (tmp_path / name for name in ("tree", "out", "beside"))
    release.copy_tracked(ROOT, tree)
    out.mkdir()
    packages.python(tree, out, kvasir.__version__)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", beside]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)
    [built], [expected] = out.glob("*.whl"), beside.glob("*.whl")
    assert contents(built) == contents(expected)
    with tarfile.open(out / f"kvasir-{kvasir.__version__}.tar.gz") as archive:
        assert f"kvasir-{kvasir.__version__}/constraints.txt" in archive.getnames(), "the formula installs with them"


def contents(wheel: Path) -> dict[str, bytes]:
    archive = zipfile.ZipFile(wheel)
    return {name: archive.read(name) for name in archive.namelist()}
