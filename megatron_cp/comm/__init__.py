"""Row movement along a plan's transfers, on torch.distributed; sees `plan.schema` only."""

from megatron_cp.comm.group_cast import RankTransfer, group_cast, group_reduce
from megatron_cp.comm.head_exchange import HeadExchange
from megatron_cp.comm.joins import Joins, add_rows_
from megatron_cp.comm.streams import Pending

__all__ = [
    "HeadExchange",
    "Joins",
    "Pending",
    "RankTransfer",
    "add_rows_",
    "group_cast",
    "group_reduce",
]
