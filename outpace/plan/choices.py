"""What is planned, and the assumptions that no option sets."""

from dataclasses import dataclass, fields

EFFICIENCY = (0.3, 0.75)  # share of the memory bandwidth that measured engines reach, one sequence at a time
MFU = (0.15, 0.45)  # share of the products a second, in training, prompts and large batches
TYPICAL = (0.47, 0.26)  # their geometric means
USABLE = 0.9  # of a device's memory: the rest is the runtime's, its buffers' and what fragments
ADAMW = 16  # bytes of a trained parameter: float32 master, gradient and two moments
LOGITS = 2**26  # entries of a chunk of float32 logits on a device (train/losses.py); three are held at once
BLOCK_STATES = 32  # states of a token, each as wide as the model, that a block's backward needs
# seconds of Outpace's calls: `outpace plan default --hardware this` on one core of an AMD EPYC with AVX-512
LAYER_OVERHEAD = 6e-6
# rho of `Sizes.experts_touched`, fitted to how the embedded model routes 1 to 12 tokens of problems (8
# experts, 2 each): `touched` in reports/answers/report.json, as `outpace calibrate default` measures it
EXPERT_OVERLAP = 0.82
COUNTS = ("context", "batch", "columns", "row_tokens", "teacher_batch", "tensor_parallel_size")
LEAST = dict.fromkeys(COUNTS, 1.0) | {"positions_per_token": 0.01}  # of others: 0


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is planned. Raises ValueError for values out of range."""

    context: int = 131072
    batch: int = 1
    rank: int = 0  # of latent KV, 0: none
    index_dim: int = 0  # of sparse attention, 0: none
    index_heads: int = 0  # 0: as many as a retrofit takes
    top_k: int = 2048
    kv_bits: float = 16.0
    draft_parameters: float = 0.0  # 0: no draft
    draft_bits: float = 16.0
    draft_layers: int = 5  # whose inputs a training keeps
    shard: bool = False  # a draft's training divides its optimizer over the devices: --set shard=true there
    columns: int = 8  # positions verified in a step
    tau: float = 0.0  # tokens per step; 0: unknown, and no speed with the draft is reported
    tokens: float = 0.0  # to cache, train on or decode; 0: no hours
    row_tokens: int = 4096  # of a cached text, and of a row in training
    teacher_batch: int = 16  # texts that a process generates together, for a teacher cache
    # of a draft, per token of a row: 512 blocks of 16 in 4,096 tokens (DFlash); for EAGLE-3 its steps_ahead
    positions_per_token: float = 2.0
    cached_layers: int = 5  # of the target, in a teacher cache
    cache_bits: float = 16.0
    layer_overhead: float = LAYER_OVERHEAD  # seconds per layer and forward, besides reading memory
    tensor_parallel_size: int = 1  # devices that hold one target together
    sum_seconds: float = 20e-6  # to begin a sum over those devices, twice a layer
    expert_overlap: float = EXPERT_OVERLAP  # 1: tokens choose their experts independently

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = LEAST.get(field.name, 0.0)
            if not least <= value <= 1e18:
                raise ValueError(f"plan: {field.name} {value}: it must be {least:g} to 1e18")
        if self.expert_overlap > 1:
            raise ValueError(f"plan: expert_overlap {self.expert_overlap}: it must be at most 1")
        if self.tau and not self.draft_parameters:
            raise ValueError("plan: tau without a draft: give draft_parameters too")
