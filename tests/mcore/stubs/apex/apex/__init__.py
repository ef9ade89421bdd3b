"""A stand-in for apex: a fused Adam and a fused LayerNorm, computed by plain torch."""
