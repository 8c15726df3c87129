# Homebrew's formula of a release: a tap holds it, and `brew install` builds Kvasir in an environment of its own.
class Kvasir < Formula
  desc "Keeps what LLM agents remember: KV caches on disk by name, served by MLX"
  homepage "@HOMEPAGE@"
  url "@URL@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on "python@3.13"

  preserve_rpath # wheels' libraries have no room for the longer names that Homebrew would write into them

  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    system python, "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--constraint", "constraints.txt", ".[all]"
    bin.install_symlink libexec/"bin/kvasir"
  end

  service do
    run [opt_bin/"kvasir", "up"]
    keep_alive crashed: true
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/kvasir --version")
    system bin/"kvasir", "--home", testpath/"home", "doctor", "--self-test"
  end
end
