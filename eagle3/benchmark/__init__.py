"""Stage 06: load on a server, measurements, the prediction on the very replies, the report."""
