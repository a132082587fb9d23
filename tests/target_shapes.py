"""The shape of a small gpt-oss of which every axis has another size."""

from examples.tiny_target.model import TargetShape

SHAPE = TargetShape(
    vocab_size=300,
    hidden_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    expert_size=64,
    num_experts=5,
    sliding_window=7,
    original_max_position=64,
    rope_factor=16.0,
)
