"""Several kernels in one call, where there are kernels: see kernels/cpu_program.py."""

from outpace.kernels.cpu_program import Program as Program
