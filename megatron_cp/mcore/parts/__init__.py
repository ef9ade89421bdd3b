"""What context ranks concern beside the layers that mix tokens: positions, norms, routers, losses, predictions."""
