// SPDX-License-Identifier: Apache-2.0
import com.hivemq.client.mqtt.MqttClient;
import com.hivemq.client.mqtt.MqttGlobalPublishFilter;
import com.hivemq.client.mqtt.datatypes.MqttQos;
import com.hivemq.client.mqtt.mqtt5.Mqtt5AsyncClient;
import com.hivemq.client.mqtt.mqtt5.Mqtt5ClientBuilder;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5Publish;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.TimeUnit;

/** The client of HiveMQ with MQTT 5.0. */
class HiveMq5 implements Main.Client {
    private final Mqtt5AsyncClient client;
    private volatile boolean again;

    HiveMq5(String host, int port, String id, boolean clean, String will) {
        Mqtt5ClientBuilder builder = MqttClient.builder().useMqttVersion5().identifier(id).serverHost(host).serverPort(port);
        builder = builder.automaticReconnect()
                .initialDelay(200, TimeUnit.MILLISECONDS)
                .maxDelay(400, TimeUnit.MILLISECONDS)
                .applyAutomaticReconnect();
        builder = builder.addConnectedListener(context -> connected());
        if (!will.isEmpty()) {
            builder = builder.willPublish(
                    Mqtt5Publish.builder().topic(will).qos(MqttQos.AT_LEAST_ONCE).payload("gone".getBytes()).build());
        }
        client = builder.buildAsync();
        client.publishes(MqttGlobalPublishFilter.ALL, HiveMq5::received);
        boolean present = client.connectWith()
                .cleanStart(clean)
                .sessionExpiryInterval(clean ? 0 : Main.EXPIRY_S)
                .keepAlive(30)
                .send()
                .join()
                .isSessionPresent();
        System.out.println("connected " + (present ? 1 : 0));
        again = true;
    }

    /** Connections after the first: the library does not tell here whether the session was present. */
    private void connected() {
        if (again) {
            System.out.println("connected ?");
        }
    }

    private static void received(Mqtt5Publish one) {
        String payload = new String(one.getPayloadAsBytes(), StandardCharsets.UTF_8);
        System.out.println("message " + one.getTopic() + " " + one.getQos().getCode() + " " + payload);
    }

    @Override
    public int subscribe(String filter, int qos) {
        return client.subscribeWith()
                .topicFilter(filter)
                .qos(MqttQos.fromCode(qos))
                .send()
                .join()
                .getReasonCodes()
                .get(0)
                .getCode();
    }

    @Override
    public void publish(String topic, int qos, byte[] payload) {
        client.publishWith().topic(topic).qos(MqttQos.fromCode(qos)).payload(payload).send().join();
    }

    @Override
    public void disconnect() {
        client.disconnect().join();
    }
}
