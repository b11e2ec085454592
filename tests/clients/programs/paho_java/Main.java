// SPDX-License-Identifier: Apache-2.0

/** A program of the kit on Paho Java. */
class Main {
    public static void main(String[] words) throws Exception {
        if (words[1].equals("5")) {
            Paho5.run(words);
        } else {
            Paho3.run(words);
        }
        System.exit(0); // the libraries leave threads
    }
}
