"""The settings of a front process arrive as they were."""

import msgspec

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.ipc.control_channel import ControlAddresses
from jaxserve.ipc.parent import encode_settings
from server.launch import FrontLaunch
from server.settings import ApiSettings, FrontSettings, ServerSettings


def test_the_settings_of_a_front_survive_the_way_to_its_process() -> None:
    settings = FrontSettings(
        config=EngineConfig(model=ModelConfig(model="fake", tokenizer="é\n")),
        api=ApiSettings(api_key=("a", "b"), max_queue=7),
        server=ServerSettings(shutdown_timeout=float("inf"), api_server_count=3),
        chat_template="{{ a }}\n",
        is_local=True,
        created=1,
    )
    launch = FrontLaunch(
        index=1,
        reader=4,
        control=ControlAddresses("ipc:///a", "ipc:///b"),
        counts_fd=5,
        settings=settings,
        connections_fd=6,
    )
    line = encode_settings(launch)
    assert line.count(b"\n") == 1
    assert msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=FrontLaunch) == launch
