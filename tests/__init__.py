"""The tests mirror the package, floor by floor.

One thread per process, fixed here before NumPy or torch is imported: rank pools (tests/ranks.py)
fork this process, which is only safe while it has one thread, and ranks must not fight for cores.
"""

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
# Tests never talk to a service; ranks meet on the loopback interface.
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
