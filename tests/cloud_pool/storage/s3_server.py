"""An S3 API on a real socket, by moto. It can be stopped and started again at the same address, with what it holds."""

from __future__ import annotations

import os
import urllib.request

from moto.server import ThreadedMotoServer

from causeway_server.cloud_pool.storage.config import FilesConfig, S3Config

# moto accepts any; the library reads them from the environment, as in production.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class S3Server:
    """A server with one bucket."""

    def __init__(self, bucket: str = "bucket") -> None:
        os.environ.update(CREDENTIALS)
        self._port = 0
        self.start()
        self._bucket = bucket
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{bucket}", method="PUT")):
            pass

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def files(self) -> FilesConfig:
        return FilesConfig(s3=S3Config(bucket=self._bucket, endpoint=self.url))

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()

    def stop(self) -> None:
        self._server.stop()
