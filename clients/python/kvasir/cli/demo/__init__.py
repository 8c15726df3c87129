"""`kvasir demo` and the self-test of `kvasir doctor`: simulated Macs with real processes."""
