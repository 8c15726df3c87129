"""The neighbour's protocol, `mlx.grpc.engine` of the package smg-grpc-proto, over the same turns. Off by default."""
