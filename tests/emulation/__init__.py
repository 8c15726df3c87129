"""The kernels on a CPU, for tests: their own source, whose lanes are fibers that meet where a warp's lanes would."""
