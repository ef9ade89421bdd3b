from megatron_cp.attn.reference import backward as backward
from megatron_cp.attn.reference import forward as forward
