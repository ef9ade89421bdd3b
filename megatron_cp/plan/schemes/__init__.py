"""Published context-parallel schemes, each a short function that emits the common plan schema."""
