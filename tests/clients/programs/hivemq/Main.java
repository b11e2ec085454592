// SPDX-License-Identifier: Apache-2.0
import java.io.BufferedReader;
import java.io.InputStreamReader;

/** A program of the kit on the client of HiveMQ. */
class Main {
    /** What both versions of MQTT do. */
    interface Client {
        int subscribe(String filter, int qos);

        void publish(String topic, int qos, byte[] payload);

        void disconnect();
    }

    static final int EXPIRY_S = 300;

    public static void main(String[] words) throws Exception {
        String[] address = words[0].split(":");
        boolean clean = words[3].equals("1");
        String will = words.length > 4 ? words[4] : "";
        int port = Integer.parseInt(address[1]);
        Client client = words[1].equals("5")
                ? new HiveMq5(address[0], port, words[2], clean, will)
                : new HiveMq3(address[0], port, words[2], clean, will);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null && !line.equals("disconnect"); line = lines.readLine()) {
            String[] command = line.split(" ");
            int qos = Integer.parseInt(command[2]);
            if (command[0].equals("subscribe")) {
                System.out.println("subscribed " + client.subscribe(command[1], qos));
            } else {
                client.publish(command[1], qos, command[3].getBytes());
                System.out.println("published");
            }
        }
        client.disconnect();
        System.exit(0); // the library leaves threads
    }
}
