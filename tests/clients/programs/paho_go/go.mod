module kit

go 1.24

require github.com/eclipse/paho.mqtt.golang v1.5.1
