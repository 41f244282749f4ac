"""A process that serves the fake engine as ``octavo serve`` serves the real one: ``fake_server.py PORT_FILE JSON``."""

import json
import sys
from pathlib import Path

from octavo.engine.args import EngineArgs
from octavo.engine.errors import ConfigError
from octavo.serving import server as server_module
from octavo.serving.logging import set_up_logging
from octavo.serving.options import ServerOptions

sys.path.insert(0, str(Path(__file__).parent))

from serving_fakes import FakeEngine, FakeOptions


class PortWriter(server_module.Server):
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
    server_module.Server = PortWriter
    server_options = ServerOptions(host="127.0.0.1", port=0, **options)
    return server_module.run_server(EngineArgs(), server_options, lambda args, sink: FakeEngine(args, sink, fake))


if __name__ == "__main__":
    sys.exit(main())
