"""Homebrew's formula of a release: Ruby reads it, and its steps run, with a stand-in for Homebrew's own part."""

import shutil
import sys

from tests.install.place import NotRun, Place, talk

# Homebrew's words that the formula uses. `sha256` is compared with the archive's, which is unpacked where steps run.
_HOMEBREW = r"""
require "digest"; require "pathname"; require "fileutils"
class Pathname
  def install_symlink(target) = (mkpath; FileUtils.ln_s(target, self))
end
class Formula
  PREFIX = Pathname(ARGV[1])
  def self.facts = (@facts ||= {})
  %i[desc homepage url sha256 license depends_on].each do |word|
    define_singleton_method(word) { |value| facts[word] = value }
  end
  def self.preserve_rpath = nil
  def self.service = nil
  def self.test = nil
  def self.[](name) = new
  def opt_bin = Pathname(ARGV[2])
  def libexec = PREFIX/"libexec"
  def bin = PREFIX/"bin"
  def system(*words) = Kernel.system(*words.map(&:to_s), exception: true)
end
load ARGV[0]
archive = Kvasir.facts.fetch(:url).delete_prefix("file://")
abort "the sum is of other bytes" unless Digest::SHA256.file(archive).hexdigest == Kvasir.facts.fetch(:sha256)
Formula::PREFIX.mkpath
Dir.chdir(Formula::PREFIX) do
  Kernel.system("tar", "-xf", archive, "--strip-components=1", exception: true)
  Kvasir.new.install
end
"""


def formula(place: Place) -> None:
    if shutil.which("ruby") is None:
        raise NotRun("no ruby here, which Homebrew brings (Debian: apt install ruby)")
    own = place.another("brew")
    python = own.home / "python"
    python.mkdir()
    (python / "python3.13").symlink_to(sys.executable)  # the Python here stands for Homebrew's
    stand_in = own.home / "homebrew.rb"
    stand_in.write_text(_HOMEBREW, encoding="utf-8")
    own.run(f"ruby {stand_in} ~/kvasir/out/release/kvasir.rb {own.home}/cellar {python} >&2")
    own.path = [own.home / "cellar" / "bin"]
    talk(own)
