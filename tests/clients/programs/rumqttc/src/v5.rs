// SPDX-License-Identifier: Apache-2.0
//! MQTT 5.0.

use crate::{next, Command, Wanted, EXPIRY_S, RETRY};
use rumqttc::v5::mqttbytes::v5::{ConnectProperties, LastWill, Packet, SubscribeReasonCode};
use rumqttc::v5::mqttbytes::{qos, QoS};
use rumqttc::v5::{AsyncClient, Event, EventLoop, MqttOptions};
use rumqttc::Outgoing;
use tokio::io::{BufReader, Lines, Stdin};
use tokio::time::sleep;

pub async fn run(wanted: Wanted, lines: Lines<BufReader<Stdin>>) {
    let mut options = MqttOptions::new(wanted.client_id, wanted.host, wanted.port);
    let mut properties = ConnectProperties::new();
    properties.session_expiry_interval = Some(if wanted.clean { 0 } else { EXPIRY_S });
    options.set_clean_start(wanted.clean);
    options.set_connect_properties(properties);
    if let Some(topic) = wanted.will {
        options.set_last_will(LastWill::new(topic, "gone", QoS::AtLeastOnce, false, None));
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
            Ok(Event::Incoming(Packet::ConnAck(one))) => println!("connected {}", one.session_present as u8),
            Ok(Event::Incoming(Packet::SubAck(one))) => match one.return_codes[0] {
                SubscribeReasonCode::Success(granted) => println!("subscribed {}", granted as u8),
                code => println!("subscribed {code:?}"),
            },
            Ok(Event::Incoming(Packet::Publish(one))) => {
                let (topic, payload) = (String::from_utf8_lossy(&one.topic), String::from_utf8_lossy(&one.payload));
                println!("message {topic} {} {payload}", one.qos as u8)
            }
            Ok(Event::Incoming(Packet::PubAck(_) | Packet::PubComp(_))) => println!("published"),
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
