"""An API process without a supervisor, over the fake engine: ``fake_server.py PORT_FILE JSON``. Signals stop it."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from octavo.engine.args import EngineArgs
from octavo.engine.errors import ConfigError
from octavo.serving.logging import set_up_logging
from octavo.serving.options import ServerOptions
from octavo.serving.server import Server

sys.path.insert(0, str(Path(__file__).parent))

from serving_fakes import FakeEngine, FakeOptions


class PortWriter(Server):
    async def open_port(self) -> None:
        await super().open_port()
        target = Path(sys.argv[1])
        target.with_suffix(".part").write_text(str(self.bound_port))
        target.with_suffix(".part").rename(target)


def main() -> int:
    options = json.loads(sys.argv[2])
    fake = FakeOptions(**options.pop("fake", {}))
    if options.pop("cannot_start", False):
        fake.start_error = ConfigError("this model is not known")
    set_up_logging("info")
    server_options = ServerOptions(host="127.0.0.1", port=0, **options)

    async def run() -> None:
        server = PortWriter(EngineArgs(), server_options, lambda args, sink: FakeEngine(args, sink, fake))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.request_stop)
        os._exit(await server.run())

    asyncio.run(run())
    return 1


if __name__ == "__main__":
    sys.exit(main())
