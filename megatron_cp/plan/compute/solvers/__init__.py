"""Optional solvers that go on from a compute assignment (extra `solvers`)."""
