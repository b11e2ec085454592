// SPDX-License-Identifier: Apache-2.0
//! MQTT 3.1.1.

use crate::{next, Command, Wanted, RETRY};
use rumqttc::{qos, AsyncClient, Event, EventLoop, Incoming, LastWill, MqttOptions, Outgoing, QoS, SubscribeReasonCode};
use tokio::io::{BufReader, Lines, Stdin};
use tokio::time::sleep;

pub async fn run(wanted: Wanted, lines: Lines<BufReader<Stdin>>) {
    let mut options = MqttOptions::new(wanted.client_id, wanted.host, wanted.port);
    options.set_clean_session(wanted.clean);
    if let Some(topic) = wanted.will {
        options.set_last_will(LastWill::new(topic, "gone", QoS::AtLeastOnce, false));
    }
    let (client, events) = AsyncClient::new(options, 10);
    let listening = tokio::spawn(listen(events));
    carry_out(client, lines).await;
    listening.await.unwrap()
}

async fn carry_out(client: AsyncClient, mut lines: Lines<BufReader<Stdin>>) {
    loop {
        match next(&mut lines).await {
            Command::Subscribe(filter, level) => client.subscribe(filter, qos(level).unwrap()).await.unwrap(),
            Command::Publish(topic, level, payload) => {
                client.publish(topic, qos(level).unwrap(), false, payload).await.unwrap()
            }
            Command::Disconnect => return client.disconnect().await.unwrap(),
        }
    }
}

async fn listen(mut events: EventLoop) {
    loop {
        match events.poll().await {
            Ok(Event::Incoming(Incoming::ConnAck(one))) => println!("connected {}", one.session_present as u8),
            Ok(Event::Incoming(Incoming::SubAck(one))) => match one.return_codes[0] {
                SubscribeReasonCode::Success(granted) => println!("subscribed {}", granted as u8),
                SubscribeReasonCode::Failure => println!("subscribed 128"),
            },
            Ok(Event::Incoming(Incoming::Publish(one))) => {
                println!("message {} {} {}", one.topic, one.qos as u8, String::from_utf8_lossy(&one.payload))
            }
            Ok(Event::Incoming(Incoming::PubAck(_) | Incoming::PubComp(_))) => println!("published"),
            Ok(Event::Outgoing(Outgoing::Publish(0))) => println!("published"), // QoS 0 has no identifier
            Ok(Event::Outgoing(Outgoing::Disconnect)) => return,
            Ok(_) => {}
            Err(error) => {
                eprintln!("{error}");
                sleep(RETRY).await
            }
        }
    }
}
