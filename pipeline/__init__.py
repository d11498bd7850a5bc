"""Train image classifiers with PyTorch DDP: kill it anywhere, restart it, resize it; the same samples, the same bits.

The rooms, from the top; each imports only from those above it (tests/test_layout.py holds that):
verdict, config, world, plan, randomness, data, group, model, parallel, record, train, operate, __main__.
"""

__version__ = "0.1.0"
