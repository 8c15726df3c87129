"""Real given names and towns of many languages: those that training may use, and those that only evaluation uses."""

from tools.kvasir_tiny.words import words

# 304 names that no training conversation holds, in any letter case. Everything in `GIVEN_NAMES` is another name.
HELD_OUT_NAMES = words("""
Mary James Robert Jennifer Linda William Barbara Susan Jessica Karen Thomas Nancy Betty Matthew Sandra Ashley Steven
Emily Donna Kenneth Michelle Brian Melissa Timothy Deborah Stephanie Rebecca Laura Cynthia Amy Kathleen Gary Brenda
Nicole Benjamin Samantha Gregory Patrick Debra Raymond Carolyn Dennis Maryam Tilda Danny Molly Wendy Harry Oliver
Poppy Freya Isla Callum Rory Fergus Siobhan Aoife Niamh Cillian Saoirse Eoin Rhys Cerys Angharad Gwen Dylan Bronwyn
François Chloé Thérèse Amélie Guillaume Océane Bastien Léa Thibault Margaux Mathilde Gaston Solène Yves Jürgen
Günther Matthias Ulrike Heike Lieselotte Wolfgang Sebastian Annika Käthe Björn Friederike Dieter Rüdiger Alejandro
Guadalupe Íñigo Begoña Javier Ximena Raúl Concepción Joaquín Esperanza Andrés Pilar Gonzalo Rocío Giuseppe Francesca
Giovanni Chiara Alessandro Ludovica Vincenzo Beatrice Gennaro Fiorella João Conceição Thiago Beatriz Gonçalo Mafalda
Rodrigo Luísa Vasco Szymon Małgorzata Wojciech Agnieszka Krzysztof Zofia Łukasz Bożena Jiří Květa Ondřej Žaneta
Zdeněk Ľubica Yuki Haruto Sakura Takeshi Keiko Ryota Akira Naoko Hiroshi Mei Xiaoming Weiwei Zhang Lihua Jianguo
Yifan Minjun Seoyeon Jihoon Hyejin Kwame Abena Ayodele Chinwe Oluwaseun Ngozi Babatunde Wanjiru Kamau Thandiwe Sipho
Nomvula Fatima Muhammad Abdullah Zainab Khalid Layla Mustafa Yasmin Rania Hassan Samira Tariq Noura Arjun Lakshmi
Rajesh Ananya Vikram Deepika Sanjay Kavita Rohit Meenakshi Siddharth Harpreet Gurpreet Amrita Mehmet Ayşe Emre
Zeynep Oğuz Gülşen Çağla Hüseyin Reza Shirin Farhad Nasrin Parisa Dariush Nguyen Linh Thanh Huong Phuong Somchai
Siriporn Nattapong Wayan Putri Agung Siti Rizal Amihan Jejomar Dmitri Ekaterina Nikolai Svetlana Vladimir Tatyana
Oksana Bohdan Yevhen Halyna Radoslav Desislava Kyriakos Eleni Dimitrios Vasiliki László Erzsébet Zoltán Boglárka
Tamás Ileana Mircea Doina Kristján Guðrún Sigríður Þór Åse Øystein Ingrid Søren Kjell Torbjørn Ragnhild Mikkel Päivi
Juhani Väinö Eevi Tõnu Kaisa Jānis Ilze Vytautas Rūta Shlomo Rivka Avraham Tzipora Yosef Miriam Kealani Makoa Tane
Aroha Wiremu Hinemoa Atahualpa Yaretzi Quetzal Nayeli Tupac Izel Giorgi Tamar Armen Anahit Aisulu Nursultan Bayarmaa
Temujin Tenzin Pema
""")

GIVEN_NAMES = words("""
John Mike Michael David Joseph Charles Daniel Anthony Mark Donald Paul Andrew Joshua Kevin George Edward Ronald
Jason Jeffrey Ryan Jacob Nicholas Eric Jonathan Stephen Larry Justin Scott Brandon Samuel Frank Alexander Jack Jerry
Tyler Aaron Jose Adam Nathan Henry Zachary Douglas Peter Kyle Noah Ethan Jeremy Walter Keith Roger Terry Austin Sean
Gerald Carl Harold Arthur Lawrence Jordan Jesse Bryan Billy Bruce Gabriel Joe Logan Alan Juan Albert Willie Elijah
Wayne Randy Vincent Mason Roy Ralph Bobby Russell Bradley Philip Eugene Patricia Elizabeth Sarah Lisa Sandy Kimberly
Emma Margaret Dorothy Amanda Sharon Donnie Kathy Helen Anna Ruth Christine Catherine Virginia Rachel Heather Maria
Diane Julie Joyce Victoria Kelly Christina Lauren Joan Evelyn Olivia Judith Megan Cheryl Andrea Hannah Martha
Jacqueline Frances Gloria Ann Teresa Kathryn Sara Janice Jean Alice Madison Julia Grace Judy Abigail Denise Marilyn
Beverly Amber Danielle Rose Brittany Diana Natalie Sophia Alexis Lori Kayla Jane Daisy Ruby Lily Florence Ivy
Harriet Alfie Archie Theo Oscar Finley Angus Hamish Ewan Iain Catriona Mhairi Ailsa Sorcha Orla Ciara Padraig Declan
Conor Liam Owen Gareth Gwyneth Carys Pierre Jacques Marcel Camille Hélène Gérard Benoît Zoé René Renée Aurélie
Céline Noémie Antoine Mathieu Clément Manon Juliette Didier Loïc Maëlle Anaïs Sylvie Hervé Fabrice Noël Gaëlle Émile
Honoré Colette Odette Élodie Raphaël Agathe Hans Klaus Greta Gisela Otto Heinrich Ursula Sabine Stefan Uwe Lutz Anke
Birgit Katrin Jörg Götz Bärbel Hildegard Lukas Felix Moritz Ludwig Friedrich Ilse Renate Monika Horst Manfred
Torsten Anneliese Brunhilde Kurt Ernst Hedwig Jannik Lars Carlos Lucía Miguel Sofía Pedro José María Ramón Mercedes
Fernando Isabel Jorge Marisol Ignacio Martín Belén Nuria Ángel Álvaro Úrsula Óscar Itziar Iker Montserrat Jordi
Núria Xavier Dolores Consuelo Ramiro Santiago Valentina Mateo Camila Luca Matteo Giulia Paolo Elena Marco Sofia
Lorenzo Silvia Antonio Caterina Rosalia Salvatore Pietro Domenico Noemi Nicolò Tiago Rui Manuel Ana Joana Catarina
Fernanda Sebastião Antônio Estêvão Simão Leonor Branca Lourenço Matilde Duarte Jan Piotr Paweł Katarzyna Marek
Stanisław Grażyna Jadwiga Andrzej Mirosława Zbigniew Bartosz Kinga Tomáš Eliška Jaroslav Věra Libuše Šárka Matěj
Petra Lenka Radek Milan Ľudovít Zuzana Božidar Nataša Mladen Željko Dragan Snežana Tijana Nenad Branka Igor Ante
Jelena Dušan Živko Goran Bojana Luka Vesna Aleš Špela Rok Anže Tjaša Ardit Blerim Drita Besnik Hana Ren Sota Aoi
Yuto Kaito Himari Mio Tomoko Kazuo Michiko Shinji Yoko Emi Daisuke Ayumi Satoshi Noboru Fumiko Isamu Kenji Wei Fang
Li Na Jun Tao Min Hui Xin Yan Chen Lei Ting Qiang Xiu Zihan Ruoxi Haoyu Yuxuan Siqi Jing Guang Bo Cheng Jiwoo Dohyun
Sumin Eunji Hyun Yuna Taeyang Sang Kyung Chul Soojin Jaehyun Nari Bora Donghae Kofi Ama Yaw Akosua Esi Ekow Emeka
Chidi Amaka Ifeoma Adaeze Obinna Tunde Folake Sade Bola Wangari Njoroge Otieno Achieng Mwangi Juma Zuri Baraka Neema
Themba Zanele Lindiwe Bongani Sibusiso Tendai Rutendo Farai Chipo Tafadzwa Mamadou Aminata Ousmane Fatou Cheikh Awa
Ibou Selam Dawit Tesfaye Abebe Hirut Meron Yonas Genet Lalibela Nakato Wasswa Okello Akello Ahmed Ali Omar Aisha
Maryem Hussein Amira Salma Karim Youssef Leila Hamza Nadia Walid Huda Bilal Dina Faisal Ghada Jamal Rashid Sana
Tamer Wafa Zaid Majid Iman Nabil Rim Anwar Basma Dalia Priya Amit Rahul Sunita Anil Pooja Neha Suresh Ramesh Geeta
Kiran Manoj Asha Ravi Shreya Aditya Ishaan Diya Kabir Nikhil Divya Varun Jaya Gopal Usha Mohan Simran Jaspreet
Manpreet Baljit Imran Ayaan Zoya Farhan Nusrat Tahmina Shakib Rubina Nimal Kumari Sanduni Dilshan Bishal Sunil Gita
Mustapha Ahmet Elif Fatma Can Deniz Ece Hakan Selin Burak Şule Özgür Çiğdem Güneş İbrahim Umut Defne Yiğit Tuğba Cem
Zahra Hamid Leyla Kaveh Roya Behrouz Mina Arash Golnaz Siavash Ladan Kian Soraya Tran Minh Anh Duc Lan Hoa Quang
Tuan Mai Nam Trang Bao Khanh Thuy Vinh Somsak Malee Prasert Kanya Chai Ploy Niran Made Ketut Dewi Budi Sari Joko
Rini Eko Ratna Bayu Indra Nur Azlan Farah Hafiz Aiman Rosnah Luzviminda Dalisay Bayani Ligaya Rizalina Danilo
Marites Ivan Olga Sergei Natalia Alexei Irina Mikhail Anastasia Boris Ludmila Oleg Vera Yuri Galina Pavel Ksenia
Maxim Polina Anton Darya Taras Olena Mykola Iryna Petro Nadiya Andriy Vasyl Larysa Ruslan Georgi Ivanka Plamen Todor
Stoyan Boyko Kalina Rumen Nikos Giorgos Katerina Panagiotis Despina Spyros Stavros Ioanna Thanos Evangelia Petros
Anikó Gábor István Katalin Ferenc Péter Ágnes Eszter Attila Réka Csaba Márta Bálint Győző Tünde Ion Andrei Mihai
Ioana Radu Simona Vlad Cătălin Ştefania Lăcrămioara Gheorghe Florin Anca Sorin Jón Sigurður Ólafur Kristín Björg
Helga Einar Þóra Ásta Gunnar Kari Nils Astrid Håkon Sigrid Leif Solveig Bjørn Tove Knut Gro Anders Erik Karin
Gunilla Håkan Åsa Örjan Märta Sven Maja Elsa Göran Pär Linnea Jens Mette Rasmus Kirsten Jørgen Bodil Aage Henrik
Lone Ragnar Matti Aino Timo Kaarina Heikki Liisa Jari Sanna Ville Tuula Pekka Marja Antti Hilkka Ülle Mart Kadri
Jaan Liina Peeter Andris Inese Māris Līga Juris Dace Jonas Ona Petras Eglė Mindaugas Žydrė Darius Aušra Moshe Leah
Yaakov Noa Eitan Hila Ariel Tal Shira Uri Yael Avi Dov Keoni Leilani Kai Malia Nohea Hemi Ngaire Rangi Mere Tama
Moana Inti Killa Sisa Amaru Citlali Itzel Xochitl Tonatiuh Nahuel Ayelen Lautaro Millaray Levan Nino Zurab Ketevan
Davit Lusine Hayk Gohar Aram Siranush Aigerim Nurlan Dinara Yerlan Aruzhan Batbayar Oyuna Ganbold Sarnai Dorji Karma
Sonam Ugyen Deki Jigme Aung Thiri Zaw Khin Win Su Sokha Chan Bopha Rith Kanha Lao Keo Noy Ada Hugo Lena Diego Zoe
Viktor Clara Bob Eve Charlie Dana Ines Tom Nina Noor Mia Leo Max Alex Sam Pat Kim Lee Jo Al Ed Bea Liv Uma Ravn Ezra
Silas Jasper Milo Otis Enzo Nora Hazel Willow Aurora Stella Luna Nova Iris Juniper Sage River Rowan Quinn Avery
Riley Skyler Reese Blake
""")

FAMILY_NAMES = words("""
Smith Jones Taylor Brown Wilson Evans Walker Wright Green Clarke Hughes Edwards Turner Parker Cook Murphy Kelly
O'Brien O'Neill McDonald MacLeod McCarthy Fitzgerald Müller Schmidt Schneider Fischer Weber Becker Schröder Köhler
Großmann Dubois Lefèvre Moreau Girard Rousseau García Fernández Muñoz Núñez Ibáñez Rossi Russo Ferrari Esposito
Silva Santos Ferreira Nowak Kowalski Wiśniewski Novák Dvořák Horváth Nagy Szabó Popescu Ionescu Ivanov Petrov
Sokolov Kuznetsov Shevchenko Papadopoulos Yılmaz Kaya Öztürk Khan Sharma Patel Singh Gupta Reddy Rahman Tanaka
Suzuki Sato Kobayashi Wang Zhao Huang Kim Park Choi Tran Pham Okafor Adeyemi Mensah Dlamini Mokoena Haddad Nasser
Cohen Levi Hansen Nilsson Lindqvist Østergård Virtanen Mäkinen Korhonen Jansen de-Vries Bakker Visser Peeters
Jónsdóttir Kipchoge Abdi Tesfay Hernández Quispe Mamani
""")

TOWNS = words("""
Manchester Leeds Bristol Glasgow Cardiff Belfast Cork Galway Austin Seattle Denver Dallas Houston Phoenix Atlanta
Miami Detroit Portland Philadelphia Montreal Vancouver Ottawa Calgary Sydney Melbourne Perth Brisbane Auckland
Wellington Munich Köln Frankfurt Stuttgart Dresden Leipzig Zürich Bern Basel Graz Salzburg Lyon Marseille Nantes
Toulouse Bordeaux Lille Nice Brussels Antwerp Bruges Rotterdam Utrecht Amsterdam Groningen Barcelona Valencia
Seville Málaga Bilbao Granada Milan Naples Venice Palermo Florence Genoa Braga Coimbra Faro Stockholm Malmö Göteborg
Copenhagen Aarhus Helsinki Tampere Tromsø Reykjavík Tallinn Riga Vilnius Kraków Gdańsk Wrocław Łódź Brno Ostrava
Bratislava Budapest Debrecen Bucharest Cluj Sofia Plovdiv Belgrade Zagreb Split Sarajevo Skopje Tirana Thessaloniki
Patras Istanbul Ankara Izmir Kyiv Lviv Odesa Moscow Kazan Tbilisi Yerevan Baku Tehran Isfahan Baghdad Beirut Amman
Damascus Haifa Dubai Doha Muscat Riyadh Karachi Lahore Mumbai Chennai Kolkata Pune Jaipur Dhaka Colombo Kathmandu
Yangon Bangkok Hanoi Saigon Manila Jakarta Bandung Singapore Taipei Shanghai Beijing Shenzhen Chengdu Xi'an Busan
Osaka Nagoya Sapporo Lagos Accra Dakar Abuja Kampala Addis Mombasa Harare Lusaka Durban Tunis Rabat Casablanca
Algiers Bogotá Medellín Quito Cusco Arequipa Santiago Valparaíso Córdoba Rosario Montevideo Asunción Recife Salvador
Curitiba Caracas Oaxaca Guadalajara Puebla
""")

LONG_TOWNS = """
New York;Los Angeles;San Francisco;San Diego;Las Vegas;New Orleans;Salt Lake City;Santa Fe;Hong Kong;Rio de Janeiro;
São Paulo;Buenos Aires;Mexico City;Cape Town;Tel Aviv;New Delhi;Kuala Lumpur;Ho Chi Minh City;Abu Dhabi;
Saint-Étienne;Aix-en-Provence;Stratford-upon-Avon;Newcastle upon Tyne;Den Haag;Bad Homburg;St. Gallen;Baden-Baden;
La Paz;El Paso;Port Louis;San José;Santa Cruz;North Bay;South Shields;East London;West Bend;Fort Worth;Long Beach;
Palo Alto;Lake Placid
""".replace("\n", "").split(";")
