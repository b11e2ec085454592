# SPDX-License-Identifier: Apache-2.0
"""Have the core of one JetStream domain store messages of another: durable sessions there get them too.

Run once against the core that is to get them, when a gateway has made its streams::

    python -m examples.federation.share --nats nats://127.0.0.1:4223 --domain north --filter 'plants/#'

The filters take the place of those that were there for this domain; without any, nothing is taken from it any more.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import nats
import orjson
from nats.errors import NoRespondersError

from mqtt_streams.messages import PREFIX, STREAM
from mqtt_streams.subjects import filter_to_subjects


def source(domain: str, filters: list[str]) -> dict[str, Any]:
    """One entry of ``sources``."""
    subjects = [PREFIX + subject for one in filters for subject in filter_to_subjects(one)]
    return {
        "name": STREAM,
        "external": {"api": f"$JS.{domain}.API"},
        "subject_transforms": [{"src": subject, "dest": subject} for subject in subjects],
    }


def overlap(one: str, other: str) -> bool:
    """Whether a message can have a subject that both stand for."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


def subjects(config: dict[str, Any], domain: str) -> list[str]:
    """What a stream takes from a domain."""
    return [
        each["src"] for one in config.get("sources") or [] if _from(one, domain) for each in one["subject_transforms"]
    ]


def _from(one: dict[str, Any], domain: str) -> bool:
    return bool((one.get("external") or {}).get("api") == f"$JS.{domain}.API")


async def _nothing(error: Exception) -> None:
    """What is wrong is raised, too."""


async def share(url: str, domain: str, filters: list[str]) -> list[dict[str, Any]]:
    """Set what is taken from a domain; every entry of ``sources`` as it is now.

    Raises:
        SystemExit: NATS does not do it, or the messages would come back from where they are sent.
    """
    try:
        client = await nats.connect(url, max_reconnect_attempts=1, reconnect_time_wait=0.1, error_cb=_nothing)
    except (OSError, nats.errors.Error) as error:
        raise SystemExit(f"no nats-server at {url}: {error}") from None

    async def ask(subject: str, body: bytes = b"") -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads((await client.request(subject, body)).data)
        if "error" in answer:
            raise SystemExit(f"{subject}: {answer['error']['description']}")
        return answer

    try:
        own = (await ask("$JS.API.INFO")).get("domain", "")
        config = (await ask(f"$JS.API.STREAM.INFO.{STREAM}"))["config"]
        wanted = [one for one in config.get("sources") or [] if not _from(one, domain)]
        if filters:
            wanted.append(source(domain, filters))
            there = (await ask(f"$JS.{domain}.API.STREAM.INFO.{STREAM}"))["config"]
            for back in subjects(there, own):
                if any(overlap(back, each) for each in subjects({"sources": wanted}, domain)):
                    raise SystemExit(f"{domain} takes {back} from here: such messages would go round for ever")
        changed = await ask(f"$JS.API.STREAM.UPDATE.{STREAM}", orjson.dumps(config | {"sources": wanted}))
        found: list[dict[str, Any]] = changed["config"].get("sources") or []
        return found
    except NoRespondersError:
        raise SystemExit(f"no JetStream of the domain {domain}, or no gateway has run there yet") from None
    finally:
        await client.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Share topics between two cores: docs/federation.md.")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", help="the core that is to get the messages")
    parser.add_argument("--domain", required=True, help="JetStream domain of the core that has them")
    parser.add_argument("--filter", action="append", default=[], help="topic filter; may be given several times")
    given = parser.parse_args()
    for one in given.filter:
        try:
            filter_to_subjects(one)
        except ValueError as error:
            parser.error(f"--filter {one}: {error}")
    for one in asyncio.run(share(given.nats, given.domain, given.filter)):
        print(one["external"]["api"], *(each["src"] for each in one["subject_transforms"]))


if __name__ == "__main__":
    main()
