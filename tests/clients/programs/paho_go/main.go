// SPDX-License-Identifier: Apache-2.0

// A program of the kit on paho.mqtt.golang, which speaks MQTT 3.1.1.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func wait(token mqtt.Token) {
	token.Wait()
	check(token.Error())
}

func main() {
	options := mqtt.NewClientOptions().AddBroker("tcp://" + os.Args[1]).SetClientID(os.Args[3])
	options.SetProtocolVersion(4).SetCleanSession(os.Args[4] == "1").SetResumeSubs(true)
	options.SetMaxReconnectInterval(200 * time.Millisecond).SetConnectTimeout(10 * time.Second)
	options.SetDefaultPublishHandler(func(_ mqtt.Client, message mqtt.Message) {
		fmt.Println("message", message.Topic(), message.Qos(), string(message.Payload()))
	})
	if len(os.Args) > 5 {
		options.SetWill(os.Args[5], "gone", 1, false)
	}
	first := true
	options.SetOnConnectHandler(func(mqtt.Client) {
		if !first { // the library does not tell whether the session was present
			fmt.Println("connected ?")
		}
		first = false
	})
	client := mqtt.NewClient(options)
	token := client.Connect().(*mqtt.ConnectToken)
	wait(token)
	present := 0
	if token.SessionPresent() {
		present = 1
	}
	fmt.Println("connected", present)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if words[0] == "disconnect" {
			break
		}
		qos, err := strconv.Atoi(words[2])
		check(err)
		if words[0] == "subscribe" {
			token := client.Subscribe(words[1], byte(qos), nil).(*mqtt.SubscribeToken)
			wait(token)
			fmt.Println("subscribed", token.Result()[words[1]])
		} else {
			wait(client.Publish(words[1], byte(qos), false, words[3]))
			fmt.Println("published")
		}
	}
	client.Disconnect(1000)
}
