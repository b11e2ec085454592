// SPDX-License-Identifier: Apache-2.0
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import org.eclipse.paho.client.mqttv3.IMqttDeliveryToken;
import org.eclipse.paho.client.mqttv3.IMqttToken;
import org.eclipse.paho.client.mqttv3.MqttAsyncClient;
import org.eclipse.paho.client.mqttv3.MqttCallbackExtended;
import org.eclipse.paho.client.mqttv3.MqttConnectOptions;
import org.eclipse.paho.client.mqttv3.MqttMessage;
import org.eclipse.paho.client.mqttv3.persist.MemoryPersistence;

/** A program of the kit on Paho Java for MQTT 3.1.1. */
class Paho3 {
    static final class Callbacks implements MqttCallbackExtended {
        @Override
        public void connectComplete(boolean again, String address) {
            if (again) {
                System.out.println("connected ?"); // the library does not tell whether the session was present
            }
        }

        @Override
        public void connectionLost(Throwable cause) {
            System.err.println(cause);
        }

        @Override
        public void messageArrived(String topic, MqttMessage message) {
            String payload = new String(message.getPayload(), StandardCharsets.UTF_8);
            System.out.println("message " + topic + " " + message.getQos() + " " + payload);
        }

        @Override
        public void deliveryComplete(IMqttDeliveryToken token) {}
    }

    static void run(String[] words) throws Exception {
        MqttAsyncClient client = new MqttAsyncClient("tcp://" + words[0], words[2], new MemoryPersistence());
        MqttConnectOptions options = new MqttConnectOptions();
        options.setMqttVersion(MqttConnectOptions.MQTT_VERSION_3_1_1);
        options.setCleanSession(words[3].equals("1"));
        options.setAutomaticReconnect(true);
        options.setMaxReconnectDelay(1000);
        if (words.length > 4) {
            options.setWill(words[4], "gone".getBytes(StandardCharsets.UTF_8), 1, false);
        }
        client.setCallback(new Callbacks());
        IMqttToken connecting = client.connect(options);
        connecting.waitForCompletion();
        System.out.println("connected " + (connecting.getSessionPresent() ? 1 : 0));
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null && !line.equals("disconnect"); line = lines.readLine()) {
            String[] command = line.split(" ");
            int qos = Integer.parseInt(command[2]);
            if (command[0].equals("subscribe")) {
                IMqttToken token = client.subscribe(command[1], qos);
                token.waitForCompletion();
                System.out.println("subscribed " + token.getGrantedQos()[0]);
            } else {
                client.publish(command[1], command[3].getBytes(StandardCharsets.UTF_8), qos, false).waitForCompletion();
                System.out.println("published");
            }
        }
        client.disconnect().waitForCompletion();
    }
}
