"""TLS of every listener and of every connection to another server: TLS 1.2 at least, and certificates that may change
while the process runs.

1. A context reads its files again when one of them has changed, at most once a second and at a handshake. Connections
   that are open stay open, with the certificates that they began with.
2. Files that cannot be used are refused at start. Later the last usable ones stay in use, and the fault is logged.
3. An own certificate that has expired, is not valid yet or has a weak key is refused. Peers' certificates are checked
   by OpenSSL, at its security level 2: RSA with 2048 bits, elliptic curves with 224.
4. Handshakes in progress are bounded in number and time, so that silent connections do not exclude the others.
"""
