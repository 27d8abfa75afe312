"""The teacher as a service over ZMQ: server, client, keys, and the command `gatespace teacher`."""
