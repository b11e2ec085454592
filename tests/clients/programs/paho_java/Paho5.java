// SPDX-License-Identifier: Apache-2.0
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import org.eclipse.paho.mqttv5.client.IMqttToken;
import org.eclipse.paho.mqttv5.client.MqttAsyncClient;
import org.eclipse.paho.mqttv5.client.MqttCallback;
import org.eclipse.paho.mqttv5.client.MqttConnectionOptions;
import org.eclipse.paho.mqttv5.client.MqttDisconnectResponse;
import org.eclipse.paho.mqttv5.client.persist.MemoryPersistence;
import org.eclipse.paho.mqttv5.common.MqttException;
import org.eclipse.paho.mqttv5.common.MqttMessage;
import org.eclipse.paho.mqttv5.common.packet.MqttProperties;

/** A program of the kit on Paho Java for MQTT 5.0. */
class Paho5 {
    private static final long EXPIRY_S = 300;

    static final class Callbacks implements MqttCallback {
        @Override
        public void connectComplete(boolean again, String address) {
            if (again) {
                System.out.println("connected ?"); // the library does not tell whether the session was present
            }
        }

        @Override
        public void disconnected(MqttDisconnectResponse response) {
            System.err.println(response);
        }

        @Override
        public void mqttErrorOccurred(MqttException error) {
            System.err.println(error);
        }

        @Override
        public void messageArrived(String topic, MqttMessage message) {
            String payload = new String(message.getPayload(), StandardCharsets.UTF_8);
            System.out.println("message " + topic + " " + message.getQos() + " " + payload);
        }

        @Override
        public void deliveryComplete(IMqttToken token) {}

        @Override
        public void authPacketArrived(int code, MqttProperties properties) {}
    }

    static void run(String[] words) throws Exception {
        MqttAsyncClient client = new MqttAsyncClient("tcp://" + words[0], words[2], new MemoryPersistence());
        MqttConnectionOptions options = new MqttConnectionOptions();
        boolean clean = words[3].equals("1");
        options.setCleanStart(clean);
        options.setSessionExpiryInterval(clean ? 0 : EXPIRY_S);
        options.setAutomaticReconnect(true);
        options.setAutomaticReconnectDelay(1, 1);
        options.setMaxReconnectDelay(1000);
        if (words.length > 4) {
            options.setWill(words[4], new MqttMessage("gone".getBytes(StandardCharsets.UTF_8), 1, false, null));
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
                System.out.println("subscribed " + token.getReasonCodes()[0]);
            } else {
                client.publish(command[1], command[3].getBytes(StandardCharsets.UTF_8), qos, false).waitForCompletion();
                System.out.println("published");
            }
        }
        client.disconnect().waitForCompletion();
    }
}
