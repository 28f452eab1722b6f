#!/bin/sh
# Makes an environment with the `breaching` package for attack_speed.py: sh benchmarks/peer_environment.sh FOLDER
# torch goes first; torchvision without its dependencies, so that it cannot replace that torch.
set -eu
here=$(dirname "$0")
"${PYTHON:-python3}" -m venv "$1"
pip="$1/bin/python -m pip install --quiet --disable-pip-version-check -c $here/../constraints.txt"
$pip ${TORCH_ARGS:-} torch numpy
$pip --no-deps torchvision==0.28.0 breaching==0.1.2
$pip scipy pillow hydra-core
echo "$1/bin/python"
