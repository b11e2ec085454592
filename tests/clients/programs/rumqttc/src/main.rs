// SPDX-License-Identifier: Apache-2.0
//! A program of the kit on rumqttc. Its client puts packets into a queue, and its event loop connects again when it is polled.

mod v4;
mod v5;

use std::collections::VecDeque;
use std::env::args;
use std::time::Duration;
use tokio::io::{stdin, AsyncBufReadExt, BufReader, Lines, Stdin};

const EXPIRY_S: u32 = 300;
const RETRY: Duration = Duration::from_millis(200);

/// What the arguments say.
struct Wanted {
    host: String,
    port: u16,
    client_id: String,
    clean: bool,
    will: Option<String>,
}

/// A command of standard input.
enum Command {
    Subscribe(String, u8),
    Publish(String, u8, String),
    Disconnect,
}

async fn next(lines: &mut Lines<BufReader<Stdin>>) -> Command {
    let line = lines.next_line().await.unwrap().unwrap_or_default();
    let words: VecDeque<&str> = line.split(' ').collect();
    match words[0] {
        "subscribe" => Command::Subscribe(words[1].into(), words[2].parse().unwrap()),
        "publish" => Command::Publish(words[1].into(), words[2].parse().unwrap(), words[3].into()),
        _ => Command::Disconnect,
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let words: Vec<String> = args().collect();
    let (host, port) = words[1].split_once(':').unwrap();
    let wanted = Wanted {
        host: host.into(),
        port: port.parse().unwrap(),
        client_id: words[3].clone(),
        clean: words[4] == "1",
        will: words.get(5).cloned(),
    };
    let lines = BufReader::new(stdin()).lines();
    if words[2] == "5" {
        v5::run(wanted, lines).await
    } else {
        v4::run(wanted, lines).await
    }
    std::process::exit(0) // standard input has a thread that waits
}
