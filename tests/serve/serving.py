"""A server on a free port, in a thread of the test's process, and what asks it."""

import threading
import time
from contextlib import contextmanager

import uvicorn

import outpace
from outpace.drafts.lookup import NGram
from outpace.serve.app import AppConfig, make_app
from outpace.serve.engine import EngineConfig
from outpace.serve.server import Served, Server

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=600, max_waiting=40)


@contextmanager
def serving(model=None, config=CONFIG, door=None, **more):
    """-> the server and its address."""
    model = model or outpace.load("default")
    drafts = {"ngram": NGram(block_size=5)}
    server = Server(Served(model=model, name="default", drafts=drafts, **more), config)
    settings = uvicorn.Config(make_app(server, door or AppConfig()), "127.0.0.1", 0, log_level="error")
    with settings.bind_socket() as listening:
        web = uvicorn.Server(settings)
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
        thread.start()
        while not web.started:
            time.sleep(0.01)
        yield server, f"http://127.0.0.1:{listening.getsockname()[1]}"
        web.should_exit = True
        thread.join()
