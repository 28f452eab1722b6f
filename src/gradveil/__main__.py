"""`python -m gradveil` is `gradveil`."""

from gradveil.cli import main

main()
