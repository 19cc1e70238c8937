"""gRPC plumbing shared by the three services: servers, channels, interceptors."""
