"""`python -m gateway.cli`: the same command without an installed script."""

from gateway.cli import main

main(prog_name="verbatim")
