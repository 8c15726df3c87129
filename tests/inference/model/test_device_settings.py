"""What MLX reads of the environment when it first looks at its device is there with the first import of the engine."""

import os
import subprocess
import sys

import pytest

SHOWN = """
import sys
sys.platform = sys.argv[1]
import inference_svc, os
print(os.environ.get("MLX_MAX_MB_PER_BUFFER"), "mlx.core" in sys.modules)
"""


@pytest.mark.parametrize(
    ("system", "given", "set_"),
    [("darwin", {}, "4000"), ("darwin", {"MLX_MAX_MB_PER_BUFFER": "7"}, "7"), ("linux", {}, "None")],
)
def test_commands_are_committed_by_their_number_on_a_mac(system: str, given: dict[str, str], set_: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MLX_MAX_MB_PER_BUFFER"} | given
    command = [sys.executable, "-c", SHOWN, system]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert shown.split() == [set_, "False"]
