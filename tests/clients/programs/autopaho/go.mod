module kit

go 1.24

require github.com/eclipse/paho.golang v0.23.0
