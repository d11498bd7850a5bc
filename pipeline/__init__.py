"""Train image classifiers with PyTorch DDP, and resume with bit-identical weights.

The packages, from top to bottom. Each imports only from itself and from those below it, which
tests/test_layout.py checks: __main__, addons, cli, operate, train, guards, record, data, parallel,
model, planning, plan, group, device, config, launcher, supervision, world, machine,
randomness, timing, errors, streams, lazy, files.
"""

__version__ = "0.3.0.dev0"
