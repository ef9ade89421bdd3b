"""Sources of the Hopper kernels, their build and their launch. Importing this never touches CUDA."""
