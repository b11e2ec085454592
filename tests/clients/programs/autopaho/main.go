// SPDX-License-Identifier: Apache-2.0

// A program of the kit on autopaho of paho.golang, which speaks MQTT 5.0.
package main

import (
	"bufio"
	"context"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/eclipse/paho.golang/autopaho"
	"github.com/eclipse/paho.golang/paho"
)

const expiryS = 300

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func received(one paho.PublishReceived) (bool, error) {
	fmt.Println("message", one.Packet.Topic, one.Packet.QoS, string(one.Packet.Payload))
	return true, nil
}

func up(_ *autopaho.ConnectionManager, connack *paho.Connack) {
	if connack.SessionPresent {
		fmt.Println("connected 1")
	} else {
		fmt.Println("connected 0")
	}
}

func main() {
	address, err := url.Parse("mqtt://" + os.Args[1])
	check(err)
	clean := os.Args[4] == "1"
	config := autopaho.ClientConfig{
		ServerUrls:                    []*url.URL{address},
		KeepAlive:                     30,
		CleanStartOnInitialConnection: clean,
		ReconnectBackoff:              autopaho.NewConstantBackoff(200 * time.Millisecond),
		ConnectTimeout:                10 * time.Second,
		OnConnectionUp:                up,
		OnConnectError:                func(err error) { fmt.Fprintln(os.Stderr, err) },
	}
	config.ClientID = os.Args[3]
	config.OnPublishReceived = []func(paho.PublishReceived) (bool, error){received}
	if !clean {
		config.SessionExpiryInterval = expiryS
	}
	if len(os.Args) > 5 {
		config.WillMessage = &paho.WillMessage{Topic: os.Args[5], Payload: []byte("gone"), QoS: 1}
	}
	ctx := context.Background()
	client, err := autopaho.NewConnection(ctx, config)
	check(err)
	check(client.AwaitConnection(ctx))
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if words[0] == "disconnect" {
			break
		}
		qos, err := strconv.Atoi(words[2])
		check(err)
		if words[0] == "subscribe" {
			filters := []paho.SubscribeOptions{{Topic: words[1], QoS: byte(qos)}}
			suback, err := client.Subscribe(ctx, &paho.Subscribe{Subscriptions: filters})
			check(err)
			fmt.Println("subscribed", suback.Reasons[0])
		} else {
			_, err := client.Publish(ctx, &paho.Publish{Topic: words[1], QoS: byte(qos), Payload: []byte(words[3])})
			check(err)
			fmt.Println("published")
		}
	}
	check(client.Disconnect(ctx))
}
