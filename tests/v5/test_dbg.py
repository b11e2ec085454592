from tests.v5.test_topics import *
def test_it(open5: Opener, name: str) -> None:
    client, publisher = open5(name, STORED), open5()
    publisher.deliver(f"${name}/a", b"kept", flags=1)
    print(client.subscribed(("+/a", 1 | AS_PUBLISHED), ("#", 0x21), ("+/#", 0x21)))
    publisher.deliver(f"${name}/a", b"x")
    publisher.deliver(f"{name}/a", b"seen")
    import time; time.sleep(1)
    print(client.ping())
    client.subscribed((f"${name}/+", 1))
    print(client.receive(2))
    publisher.deliver(f"${name}/a", b"y")
    print(client.receive(2))
    assert 0
