"""Benchmarks: every figure is a ratio of two sides measured in turns in one run."""

from specdec.process import prepare_client_process

# Before anything imports torch: the sides in this process wait as the services do,
# or a busy machine would slow them several times more. It costs them nothing on a
# quiet one.
prepare_client_process()
